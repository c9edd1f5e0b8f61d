"""The kinds of devices that a worker computes on, behind one interface."""
