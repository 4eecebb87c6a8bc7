"""Serving a hybrid: a prefix cache that knows recurrent states, a server over it, traces played through it."""
