"""The client's side of the OpenAI interface: one streamed request, and when its tokens came.

An HTTP/1.1 client of its own, since client and server share the processor in most measurements:
bytes become events in the callback of the socket, without a task being woken for each token.
"""
