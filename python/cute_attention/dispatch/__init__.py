"""Which backend serves a call, and why."""
