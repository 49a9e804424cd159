"""Takes away from perdure what CPython does not have on Windows or on macOS.

Python imports this file in each process that has its folder in PYTHONPATH. PERDURE_TEST_SYSTEM
names the system. Modules of perdure get other modules `os`, `sys`, ... than the rest of the process:
without the names that CPython's documentation ("Availability") and typeshed do not give to that
system, and with its behaviour where Linux's is kinder. No file of /proc, /sys or /dev/shm exists in
the process.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import select
import selectors
import signal
import socket
import stat
import sys
import time
import warnings
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

# In both. A pattern takes no more away than the names that it is for.
LINUX_ONLY = {
    "os": """EFD_* GRND_* MFD_* O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_RSYNC O_TMPFILE POSIX_FADV_*
        P_PIDFD RTLD_DEEPBIND RWF_* SCHED_BATCH SCHED_IDLE SCHED_RESET_ON_FORK SPLICE_* ST_APPEND
        ST_MANDLOCK ST_NOATIME ST_NODEV ST_NODIRATIME ST_NOEXEC ST_RELATIME ST_SYNCHRONOUS
        ST_WRITE XATTR_* copy_file_range eventfd* fdatasync getrandom getresgid getresuid getxattr
        listxattr memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate removexattr
        sched_getaffinity sched_getparam sched_getscheduler sched_rr_get_interval
        sched_setaffinity sched_setparam sched_setscheduler setresgid setresuid setxattr splice
        waitid waitid_result CLONE_* unshare setns""",
    "signal": """SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait
        sigwaitinfo struct_siginfo""",
    "errno": """EADV EBADE EBADFD EBADR EBADRQC EBADSLT EBFONT ECHRNG ECOMM EDOTDOT EISNAM EKEY* EL2*
        EL3* ELIB* ELNRNG EMEDIUMTYPE ENAVAIL ENOANO ENOCSI ENOKEY ENOMEDIUM ENONET ENOPKG ENOTNAM
        ENOTUNIQ EREMCHG EREMOTEIO ERESTART ERFKILL ESRMNT ESTRPIPE EUCLEAN EUNATCH EXFULL""",
    "mmap": """MADV_DODUMP MADV_DOFORK MADV_DONTDUMP MADV_DONTFORK MADV_HUGEPAGE MADV_HWPOISON
        MADV_MERGEABLE MADV_NOHUGEPAGE MADV_REMOVE MADV_UNMERGEABLE MAP_DENYWRITE MAP_EXECUTABLE
        MAP_POPULATE MAP_STACK""",
    "time": "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
    "socket": """AF_ALG AF_CAN AF_NETLINK AF_PACKET AF_VSOCK SCM_CREDENTIALS SOCK_CLOEXEC SOCK_NONBLOCK
        SO_BINDTODEVICE SO_DOMAIN SO_MARK SO_PASSCRED SO_PEERCRED SO_PEERSEC SO_PRIORITY
        SO_PROTOCOL TCP_CONGESTION TCP_CORK TCP_DEFER_ACCEPT TCP_INFO TCP_KEEPIDLE TCP_LINGER2
        TCP_QUICKACK TCP_SYNCNT TCP_USER_TIMEOUT TCP_WINDOW_CLAMP MSG_MORE MSG_CONFIRM
        MSG_ERRQUEUE""",
    "select": "EPOLL* POLLMSG POLLRDHUP epoll",
    "selectors": "EpollSelector",
}
# Beside those above.
NOT_ON_WINDOWS = {
    "os": """CLD_* EX_[!O]* EX_OS* F_LOCK F_TEST F_TLOCK F_ULOCK NGROUPS_MAX O_ACCMODE O_ASYNC
        O_CLOEXEC O_DIRECTORY O_DSYNC O_FSYNC O_NDELAY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC
        POSIX_SPAWN_* PRIO_* P_ALL P_PGID P_PID RTLD_* SCHED_* SEEK_DATA SEEK_HOLE ST_* WCONTINUED
        WCOREDUMP WEXITED WEXITSTATUS WIF* WNOHANG WNOWAIT WSTOPPED WSTOPSIG WTERMSIG WUNTRACED
        chown chroot confstr* ctermid environb fchdir fchmod fchown fork forkpty fpathconf
        fstatvfs fwalk get_blocking getegid getenvb geteuid getgid getgrouplist getgroups
        getloadavg getpgid getpgrp getpriority getsid getuid initgroups killpg lchown lockf
        login_tty major makedev minor mkfifo mknod nice openpty pathconf* posix_spawn* pread
        preadv pwrite pwritev readv register_at_fork sched_* sendfile set_blocking setegid seteuid
        setgid setgroups setpgid setpgrp setpriority setregid setreuid setsid setuid spawnlp
        spawnlpe spawnvp spawnvpe statvfs sync sysconf* tcgetpgrp tcsetpgrp ttyname uname wait
        wait3 wait4 writev""",
    "signal": """ITIMER_* ItimerError SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGIOT SIGKILL SIGPIPE
        SIGPROF SIGQUIT SIGSTOP SIGSYS SIGTRAP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2
        SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK Sigmasks alarm
        getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait""",
    "errno": "EMULTIHOP ENOTBLK",
    "mmap": "MADV_* MAP_* PROT_*",
    "time": "CLOCK_* clock_* tzset",
    "socket": """AF_UNIX CMSG_* SCM_RIGHTS SO_REUSEPORT MSG_DONTWAIT MSG_EOR MSG_NOSIGNAL recv_fds
        send_fds sethostname""",
    "select": "POLL* PIPE_BUF poll",
    "selectors": "PollSelector",
    "sys": "abiflags getdlopenflags setdlopenflags",
}
MODULES = {
    "macos": (),
    "windows": (
        "fcntl",
        "grp",
        "posix",
        "pty",
        "pwd",
        "readline",
        "resource",
        "syslog",
        "termios",
        "tty",
    ),
}
# macOS has F_OFD_*, too, but with another `struct flock` than perdure would give it.
ONLY_LINUX_OF_FCNTL = """DN_* F_ADD_SEALS F_EXLCK F_GET_SEALS F_GETLK64 F_GETPIPE_SZ F_GETSIG F_NOTIFY
    F_OFD_* F_SEAL_* F_SETLK64 F_SETLKW64 F_SETPIPE_SZ F_SETSIG F_SHLCK LOCK_MAND LOCK_READ LOCK_RW
    LOCK_WRITE"""
F_FULLFSYNC = 51  # its number on macOS
O_BINARY = 0x8000


class Lacking(ModuleType):
    """A module without some names; what is set in it is set in the real one."""

    def __init__(self, real: ModuleType, lacks: str, **others: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _lacks=lacks.split(), _others=others)

    def __getattr__(self, name: str) -> Any:
        if name in self._others:
            return self._others[name]
        if any(fnmatchcase(name, pattern) for pattern in self._lacks):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._others:
            self._others[name] = value
        else:
            setattr(self._real, name, value)


def hide_linux() -> None:
    """Let no file of /proc, /sys and /dev/shm exist, for all modules."""
    taken = ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access")
    for owner, name in ((builtins, "open"), (io, "open"), *((os, each) for each in taken)):
        setattr(owner, name, _without(getattr(owner, name), name))


def _without(real: Any, name: str) -> Any:
    def call(path: Any = ".", *arguments: Any, **named: Any) -> Any:
        if not isinstance(path, int):
            text = os.fsdecode(path)
            if text.startswith(("/proc/", "/sys/", "/dev/shm")) or text in ("/proc", "/sys"):
                if name == "access":
                    return False
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
        return real(path, *arguments, **named)

    return call


def _with_encoding(real: Any) -> Any:
    def call(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if "b" not in mode and "encoding" not in named:
            asks = sys._getframe(1).f_globals.get("__name__", "")
            assert asks.partition(".")[0] != "perdure", f"{asks}: {path} is opened in cp1252"
        return real(path, mode, *arguments, **named)

    return call


def windows_os() -> dict[str, Any]:
    """What `os` does otherwise on Windows. Files that were opened as text are not to be read raw."""
    import fcntl

    in_text_mode: set[int] = set()

    def open_(path: Any, flags: int, mode: int = 0o777) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        fd = os.open(path, flags & ~O_BINARY, mode)
        (in_text_mode.discard if flags & O_BINARY else in_text_mode.add)(fd)
        return fd

    def raw(name: str) -> Any:
        def call(fd: int, *arguments: Any) -> Any:
            assert fd not in in_text_mode, f"os.{name}: a file that was opened without O_BINARY"
            return getattr(os, name)(fd, *arguments)

        return call

    def fsync(fd: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        os.fsync(fd)

    def kill(pid: int, number: int) -> None:
        raise AssertionError("os.kill ends the process on Windows, with any number")

    raws = {name: raw(name) for name in ("read", "write", "lseek")}
    return {"name": "nt", "open": open_, "fsync": fsync, "kill": kill, "O_BINARY": O_BINARY, **raws}


class WindowsMap(mmap.mmap):
    """Memory that takes Windows's arguments."""

    def __new__(
        cls,
        fileno: int,
        length: int,
        tagname: str | None = None,  # noqa: ARG004 (Windows has it, and perdure gives none)
        access: int = 0,
        offset: int = 0,
    ) -> WindowsMap:
        return super().__new__(cls, fileno, length, access=access, offset=offset)


def macos_fcntl() -> ModuleType:
    """`fcntl` with F_FULLFSYNC and without the commands of Linux."""
    import fcntl

    names = {"F_FULLFSYNC": F_FULLFSYNC}

    def control(fd: int, command: int, argument: Any = 0) -> Any:
        if command == F_FULLFSYNC:
            assert stat.S_IFMT(os.fstat(fd).st_mode) in (stat.S_IFREG, stat.S_IFDIR)
            os.fsync(fd)
            return 0
        return fcntl.fcntl(fd, command, argument)

    return Lacking(fcntl, ONLY_LINUX_OF_FCNTL, fcntl=control, **names)


def pretend(system: str) -> None:
    """Give the modules of perdure the modules of `system`."""
    real = (os, signal, errno, mmap, time, socket, select, selectors, sys)
    others: dict[str, dict[str, Any]] = {
        "sys": {"platform": "win32" if system == "windows" else "darwin"},
        "selectors": {"DefaultSelector": selectors.PollSelector},
    }
    if system == "windows":
        others |= {"os": windows_os(), "mmap": {"mmap": WindowsMap}}
        others["signal"] = {"Signals": _windows_signals()}
    modules: dict[str, ModuleType | None] = dict.fromkeys(MODULES[system])
    for module in real:
        name = module.__name__
        lacks = LINUX_ONLY.get(name, "")
        if system == "windows":
            lacks += " " + NOT_ON_WINDOWS.get(name, "")
        modules[name] = Lacking(module, lacks, **others.get(name, {}))
    if system == "macos":
        modules["fcntl"] = macos_fcntl()
    import_ = builtins.__import__

    def import_other(
        name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        asks = str((globals_ or {}).get("__name__", "")).partition(".")[0]
        if asks == "perdure" and level == 0 and name in modules:
            if (module := modules[name]) is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return module
        return import_(name, globals_, locals_, fromlist, level)

    builtins.__import__ = import_other
    hide_linux()
    if system == "windows":  # where the encoding of a text file is not UTF-8
        builtins.open = _with_encoding(builtins.open)
        warnings.filterwarnings("ignore", category=EncodingWarning)
        warnings.filterwarnings("error", category=EncodingWarning, module=r"perdure(\.|$)")


def _windows_signals() -> Any:
    from enum import IntEnum

    kept = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM")
    return IntEnum("Signals", {name: int(getattr(signal, name)) for name in kept})


if system := os.environ.get("PERDURE_TEST_SYSTEM"):
    pretend(system)
