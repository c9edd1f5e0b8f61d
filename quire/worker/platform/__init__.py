"""What differs between the kinds of devices that a worker computes on, behind one interface."""
