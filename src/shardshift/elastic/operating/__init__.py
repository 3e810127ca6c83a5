"""How a running job is asked and watched from outside: requests, their sources, the control endpoint, metrics, logs."""
