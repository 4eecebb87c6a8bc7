"""Serving a hybrid: what it costs, a prefix cache that knows recurrent states, traces replayed and simulated."""
