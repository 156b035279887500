"""The contract folder: every agreement between Gapless processes, public and private.

A thing lives here only if two processes must agree on it. Imports the standard library, msgspec
and numpy; the generated ``*_pb2_grpc`` stubs alone import grpc.
"""
