"""Orders in which waiting requests are admitted."""
