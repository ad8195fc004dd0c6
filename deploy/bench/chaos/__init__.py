"""`tokend bench chaos`: kills processes under load and checks that clients are not affected."""
