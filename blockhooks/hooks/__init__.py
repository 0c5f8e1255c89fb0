"""The built-in plugins, one file each. They use only what a third party's plugin can use."""
