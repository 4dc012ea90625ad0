"""The process that reward functions run in: no JAX, one call at a time.

`worker_pool` starts it with a socket. Messages are a length (4 bytes, little endian) and a body:
pickles towards the worker (its parent made them), JSON back.

    -> {'function', 'directory'}        <- {'ready': true} or {'failed': why}
    -> (prompt, response, meta)         <- {'score', 'kind', 'reason', 'trace', 'seconds'}

Standard output goes where standard error goes, so a function may print what it likes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import signal
import socket
import struct
import sys
import time

from fuse_jax.scoring import reward_call

HEADER = struct.Struct("<I")


def main(descriptor: int, parent: int) -> None:
    """Serve the socket `descriptor` until the parent, process `parent`, hangs up."""
    stream = socket.socket(fileno=descriptor)
    stream.set_inheritable(False)
    _die_with(parent)
    faulthandler.enable()
    with contextlib.suppress(EOFError, ConnectionError):
        _serve(stream)
    # Not a return: threads that a function left behind would keep the process.
    os._exit(0)


def _serve(stream: socket.socket) -> None:
    setup = pickle.loads(_receive(stream))
    os.chdir(setup["directory"])
    try:
        function = reward_call.load(setup["function"])
    except ValueError as error:
        _send(stream, {"failed": str(error)})
        return
    _send(stream, {"ready": True})
    while True:
        body = _receive(stream)
        started = time.monotonic()
        try:
            prompt, response, meta = pickle.loads(body)
        except Exception as error:  # meta holds something whose module is not importable here
            outcome = reward_call.failed(error)
        else:
            outcome = reward_call.call(function, prompt, response, meta)
        _send(stream, {**outcome._asdict(), "seconds": time.monotonic() - started})
        with contextlib.suppress(Exception):  # the function may have closed or replaced it
            sys.stdout.flush()


def _receive(stream: socket.socket) -> bytes:
    (count,) = HEADER.unpack(_exactly(stream, HEADER.size))
    return _exactly(stream, count)


def _exactly(stream: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = stream.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _send(stream: socket.socket, message: dict) -> None:
    body = json.dumps(message).encode()
    stream.sendall(HEADER.pack(len(body)) + body)


def _die_with(parent: int) -> None:
    """On Linux, be killed when the thread that started this process ends, whatever runs here.

    Elsewhere a worker ends when it next reads its socket.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)
