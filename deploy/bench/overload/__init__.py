"""More load than a daemon can take: what is refused, and what those who are let in notice."""
