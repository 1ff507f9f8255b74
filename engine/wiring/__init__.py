"""EngineArgs to an engine: the only files that know everything."""
