from launch.processes import world

__all__ = ["world"]
