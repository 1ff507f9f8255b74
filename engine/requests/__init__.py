"""The records that all rooms read: a request, a batch, a step; and the listeners of events."""
