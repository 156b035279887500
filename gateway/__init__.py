"""The gateway process: the public gRPC API in front of a scheduler."""
