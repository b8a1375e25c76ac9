"""`rankdeck inspect`: training that anything has launched, looked at from outside. Its ranks need nothing prepared."""
