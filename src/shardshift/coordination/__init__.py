"""How the processes of a job agree over a store, and how they notice one that is gone."""

from .agreement import opened, refusal, settle, to_record
from .answering import AnsweringStore
from .ballot import Electorate
from .control import Control
from .eras import begin_era, current_era, era_store, first_era, lost_before, present_store
from .failure import dismiss, dismissed, known_dead, record_failure, record_loss, stands_by, tell_loss
from .pulse import Pulse, as_peer_lost
from .quorum import assent, is_formed
from .signs import any_beats, diagnose
from .watch import Watch

__all__ = [
    "AnsweringStore",
    "Control",
    "Electorate",
    "Pulse",
    "Watch",
    "any_beats",
    "as_peer_lost",
    "assent",
    "begin_era",
    "current_era",
    "diagnose",
    "dismiss",
    "dismissed",
    "era_store",
    "first_era",
    "is_formed",
    "known_dead",
    "lost_before",
    "opened",
    "present_store",
    "record_failure",
    "record_loss",
    "refusal",
    "settle",
    "stands_by",
    "tell_loss",
    "to_record",
]
