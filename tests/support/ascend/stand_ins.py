"""Stand-ins for the CANN libraries that MindSpore's Ascend plugin links to, built from what the wheel asks for.

    python tests/support/ascend/stand_ins.py FOLDER

Only what has to return something is written by hand, in `stand_ins.cc`. Every other function returns 0. With them and
`MS_SIMULATION_LEVEL=1`, MindSpore compiles graphs with all passes of its Ascend backend and plans their memory, on any
Linux machine.
"""
import fcntl
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

TOOLS = "g++", "nm"
LIBRARIES = ("acl_op_compiler", "acl_tdt_channel", "msprofiler", "atb", "profapi", "ge_runner", "graph", "hccl",
             "runtime", "platform", "c_sec", "nnopbase", "ascend_hal", "opapi")
# Functions that the plugin looks up by name while it runs, and those whose names it does not hold in one piece.
_LOOKED_UP = re.compile(rb"\0((?:acl|Hccl|Hcom|Msprof)\w+)(?=\0)")
_HIDDEN = {
    "AddTensorAddrToCachedList", "CanUsePTACache", "GetExecutorHash", "InitHugeMemThreadLocal",
    "InitPTACacheThreadLocal", "PTAGetExecCache", "ReleaseHugeMem", "SetPTAHashKey", "UnInitHugeMemThreadLocal",
    "UnInitPTACacheThreadLocal"}


def missing():
    """Return why nothing can be built here, or None."""
    if sys.platform != "linux":
        return "the Ascend plugin is for Linux"
    tools = [tool for tool in TOOLS if shutil.which(tool) is None]
    if tools:
        return f"no {' and '.join(tools)} to build stand-ins for CANN"
    return None if _plugins() else "this MindSpore has no Ascend plugin"


def build(parent):
    """Build all libraries in `parent/cann/lib64`; return `parent/cann`: MindSpore looks for a folder of that name."""
    folder = parent / "cann"
    libraries = folder / "lib64"
    package = folder / "python" / "hccl"  # which MindSpore asks for its version
    for part in (libraries, folder / "opp", folder / "compiler", package):
        part.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sys_version.py").write_text('__sys_version__ = "8.5.0"\n', encoding="utf-8")
    (folder / "compiler" / "version.info").write_text("Version=8.5.0\n", encoding="utf-8")
    written = folder / "stand_ins.o"
    _run("g++", "-O1", "-fPIC", "-D_GLIBCXX_USE_CXX11_ABI=0", "-c", Path(__file__).with_suffix(".cc"), "-o", written)
    names = (_undefined() | _looked_up()) - _symbols("--defined-only", written)
    zeros = folder / "zeros.s"
    functions = [f".globl {n}\n.type {n},@function\n{n}:\n xor %eax,%eax\n ret\n" for n in sorted(names)]
    zeros.write_text(".text\n" + "".join(functions) + '.section .note.GNU-stack,"",@progbits\n', encoding="utf-8")
    _run("g++", "-shared", "-fPIC", "-Wl,-soname,libascendcl.so", "-o", libraries / "libascendcl.so", written, zeros)
    nothing = folder / "nothing.s"
    nothing.write_text('.section .note.GNU-stack,"",@progbits\n', encoding="utf-8")
    for name in LIBRARIES:
        _run("g++", "-shared", "-fPIC", f"-Wl,-soname,lib{name}.so", "-o", libraries / f"lib{name}.so", nothing,
             "-Wl,--no-as-needed", f"-L{libraries}", "-lascendcl")
    return folder


def variables(cann):
    """Return the environment variables with which MindSpore finds the stand-ins in a folder, and launches nothing."""
    path = filter(None, (str(cann / "python"), os.environ.get("PYTHONPATH")))
    return {"LD_LIBRARY_PATH": str(cann / "lib64"), "ASCEND_HOME_PATH": str(cann), "ASCEND_TOOLKIT_HOME": str(cann),
            "ASCEND_OPP_PATH": str(cann / "opp"), "PYTHONPATH": os.pathsep.join(path), "MS_SIMULATION_LEVEL": "1"}


def shared_folder(tmp_path_factory):
    """Return the folder that all workers of pytest-xdist share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@contextmanager
def locked(path):
    """Let the workers of pytest-xdist in one after the other."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def built_once(tmp_path_factory):
    """Return the folder of stand-ins that are built once for all tests and workers."""
    folder = shared_folder(tmp_path_factory)
    with locked(folder / "cann.lock"):
        return folder / "cann" if (folder / "cann").exists() else build(folder)


def _run(*command):
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)


def _folder():
    return Path(find_spec("mindspore").origin).parent / "lib"


def _plugins():
    found = [*_folder().glob("plugin/libmindspore*ascend*.so*"), *_folder().glob("plugin/ascend/**/*.so")]
    return [file for file in found if file.parent.name != "so_kernels"]  # kernels for the device


def _symbols(kind, *files):
    of_library = "-D" if kind == "--undefined-only" or files[0].suffix != ".o" else "-g"
    command = ["nm", of_library, kind, *map(str, files)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    rows = [line.split() for line in found.splitlines()]
    return {row[-1].split("@")[0] for row in rows if len(row) > 1 and row[-2] in "UTWVBDRi"}


def _undefined():
    """Return the functions that the plugin needs, and no library of the wheel or of the system has."""
    folders = (*_folder().glob("*.so*"), *_folder().glob("plugin/*.so*"), *_plugins(), *_folder().parent.glob("*.so"))
    wheel = [file for file in folders if file.is_file()]
    cann = re.compile(r"acl|Hccl|Hcom|hccl|rt[A-Z]|hal|drv|Msp|msp|ge|_ZNK?2ge|_ZTI?N2ge|_ZNK?3atb")
    wanted = {name for name in _symbols("--undefined-only", *_plugins()) if cann.match(name)}
    return wanted - _symbols("--defined-only", *wheel)


def _looked_up():
    names = {name.decode() for plugin in _plugins() for name in _LOOKED_UP.findall(plugin.read_bytes())}
    return names | _HIDDEN | {f"{name}GetWorkspaceSize" for name in names if name.startswith("aclnn")}


if __name__ == "__main__":
    build(Path(sys.argv[1]))
