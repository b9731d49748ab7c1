"""One download with the package `download`, in a process of its own: that can be stopped, and limited by the system. `fetch` runs it as

    python -I transfer.py URL PATH CONNECT_SECONDS MOST_BYTES MOST_SECONDS PROGRESSBAR FOLDERS_TO_IMPORT_FROM...

It exits with 1 and one message on stdout if that fails. Nothing here imports the package, so that it starts in 0.1 s.
"""
import resource
import signal
import socket
import sys
from contextlib import redirect_stdout


def main(url: str, path: str, connect_seconds: str, most_bytes: str, most_seconds: str, progressbar: str, *folders: str) -> int:
    """Fetch `url` to `path`; the status to exit with."""
    sys.path[:] = folders
    from download import download

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever waits for this process ends it
    signal.alarm(int(most_seconds))  # nobody waits any more if that one was killed
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(most_bytes), int(most_bytes)))
    socket.setdefaulttimeout(float(connect_seconds))  # `download` sets one for connecting only
    shown = bool(int(progressbar))
    try:
        # It writes its bar to stdout.
        with redirect_stdout(sys.stderr):
            download(url, path, kind="file", progressbar=shown, verbose=shown, timeout=float(connect_seconds))
    except Exception as error:  # whatever fails in it, the next mirror is tried
        # It wraps what went wrong in two lines, the second of which says it.
        print(str(error).split("\nError: ")[-1] or type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
