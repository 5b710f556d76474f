package shm

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/paceline/paceline/internal/forked"
	"github.com/paceline/paceline/transport"
)

// addr is an address: the host's name, a slash, and the name of a listener on it. Of the end that has connected it is its process.
type addr string

func (a addr) Network() string { return Kind }
func (a addr) String() string  { return string(a) }

// thisHost names what the processes have in common that can share memory: the running kernel, a dot, and the network namespace, to
// which names of sockets belong.
func thisHost() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	namespace, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return "", err
	}
	return shortened(boot) + "." + shortened(append(boot, namespace...)), nil
}

func shortened(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:6])
}

// socket is the unix socket of an address of this host.
func (t *network) socket(address string) (*net.UnixAddr, error) {
	host, name, ok := strings.Cut(address, "/")
	if !ok {
		return nil, &net.AddrError{Err: "a host and a name are needed, with a slash between them", Addr: address}
	}
	kernel, _, _ := strings.Cut(host, ".")
	switch ours, _, _ := strings.Cut(t.host, "."); {
	case kernel != ours:
		return nil, fmt.Errorf("%w (this one is %s)", transport.ErrElsewhere, t.host)
	case host != t.host:
		return nil, errors.New("it is in another container of this machine: only processes in one network namespace share memory")
	}
	return &net.UnixAddr{Net: "unix", Name: "@paceline/" + name}, nil
}

// listener gives connections addresses of the kind.
type listener struct {
	*net.UnixListener
	at addr
}

func (l listener) Addr() net.Addr { return l.at }

func (l listener) Accept() (net.Conn, error) {
	nc, err := l.AcceptUnix()
	if err != nil {
		return nil, err
	}
	s := newSocket(nc, "a process")
	if who, err := s.credentials(); err == nil {
		s.peer = addr(fmt.Sprintf("process %d", who.Pid))
	}
	return s, nil
}

// socket is the connection over which two ends agree on their shared memory.
type socket struct {
	*net.UnixConn
	peer addr
}

func newSocket(nc *net.UnixConn, peer addr) *socket {
	forked.Note(nc)
	return &socket{nc, peer}
}

func (s *socket) RemoteAddr() net.Addr { return s.peer }

func (s *socket) Close() error { return forked.Close(s.UnixConn) }

// credentials are those of the process that has connected, or that listens.
func (s *socket) credentials() (who *unix.Ucred, err error) {
	raw, err := s.SyscallConn()
	if err != nil {
		return nil, err
	}
	if failed := raw.Control(func(fd uintptr) { who, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); failed != nil {
		return nil, failed
	}
	return who, err
}

// ofOneUser checks that the peer's process may do to this one what shared memory allows, as it may anyway.
func (s *socket) ofOneUser() error {
	who, err := s.credentials()
	if err == nil && int(who.Uid) != os.Geteuid() {
		err = fmt.Errorf("the peer is a process of user %d, this one of user %d: they share no memory", who.Uid, os.Geteuid())
	}
	return err
}

// numFiles is how many descriptors are passed: the memory's, and those of the doorbells.
const numFiles = 1 + numBells

// exchange passes descriptors to the peer, waits until it has confirmed them, and tells it whether its arena, which may come with
// that, is mapped here.
func (s *socket) exchange(files []int) (*borrowed, error) {
	if err := s.pass(files...); err != nil {
		return nil, err
	}
	theirs, err := s.passed(0, 1)
	if err != nil {
		return nil, err
	}
	if len(theirs) == 0 {
		return nil, nil
	}
	arena, _ := borrow(theirs[0]) // without it everything travels
	said := byte(0)
	if arena != nil {
		said = 1
	}
	if _, err = s.Write([]byte{said}); err != nil {
		arena.leave()
		return nil, err
	}
	return arena, nil
}

// pass passes descriptors to the peer.
func (s *socket) pass(files ...int) error {
	_, _, err := s.WriteMsgUnix([]byte{byte(len(files))}, unix.UnixRights(files...), nil)
	return err
}

// confirm tells the peer that this end uses what was passed, and passes it a file, unless that is -1. It reports whether the peer
// has mapped that.
func (s *socket) confirm(file int) (mapped bool, err error) {
	if file < 0 {
		_, err = s.Write([]byte{0})
		return false, err
	}
	if err = s.pass(file); err != nil {
		return false, err
	}
	said := make([]byte, 1)
	_, err = io.ReadFull(s, said)
	return said[0] == 1, err
}

// passed is what the peer has passed, so many descriptors; the caller closes them.
func (s *socket) passed(least, most int) ([]int, error) {
	said, control := make([]byte, 1), make([]byte, unix.CmsgSpace(4*most))
	got, n, flags, _, err := s.ReadMsgUnix(said, control)
	if err != nil {
		return nil, err
	}
	var files []int
	messages, err := unix.ParseSocketControlMessage(control[:n])
	for i := range messages {
		some, bad := unix.ParseUnixRights(&messages[i])
		files, err = append(files, some...), errors.Join(err, bad)
	}
	if err == nil && got == 0 {
		err = io.ErrUnexpectedEOF
	}
	if err == nil && (len(files) < least || len(files) > most || flags&unix.MSG_CTRUNC != 0) {
		err = fmt.Errorf("the peer passed %d descriptors, want %d to %d", len(files), least, most)
	}
	if err != nil {
		closeAll(files)
		return nil, err
	}
	return files, nil
}

func closeAll(files []int) {
	for _, fd := range files {
		_ = unix.Close(fd)
	}
}
