"""Load against one server: when requests go out, what is made of the answers, how it is shown."""
