"""Both halves of a KV connector, made when they are asked for: the engine has no torch."""


def __getattr__(name: str) -> type:
    if name == "FolderScheduler":
        from engine_core.kv_connector.shared_storage import SharedStorageScheduler

        return type(name, (SharedStorageScheduler,), {})
    if name == "FolderWorker":
        from worker.kv_connector.shared_storage import SharedStorageWorker

        return type(name, (SharedStorageWorker,), {})
    raise AttributeError(name)
