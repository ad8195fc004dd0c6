"""SupervisorCommands in which waiting requests are admitted."""
