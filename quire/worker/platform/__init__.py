"""Hardware platforms of a worker, behind one interface."""
