"""transfer: moving parked tensors between device and host while the device computes."""
