"""What streaming costs front end and engine when the model costs nothing."""
