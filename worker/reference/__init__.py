"""What computes in plain torch, slowly: with this the devices are compared. Start at device.py."""
