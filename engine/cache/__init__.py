"""Which memory is whose, planned on the host, and the memory itself, on the device."""
