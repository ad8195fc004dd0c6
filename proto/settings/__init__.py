"""Every setting with its default, and the checks of the settings."""
