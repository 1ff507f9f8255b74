"""The engine is built here from `EngineArgs`: only these files know every part."""
