// Package secret makes, reads and checks a job's secret, which authenticates its processes to each other.
package secret

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/paceline/paceline/internal/limits"
)

// MinBytes is the least length of a secret.
const MinBytes = 16

// New makes a secret of 256 random bits, in hexadecimal.
func New() []byte { return []byte(hex.EncodeToString(random(32))) }

// Check reports a secret shorter than MinBytes or longer than limits.MaxSecret.
func Check(secret []byte) error {
	if len(secret) < MinBytes || len(secret) > limits.MaxSecret {
		return fmt.Errorf("a secret of %d bytes, allowed are %d to %d", len(secret), MinBytes, limits.MaxSecret)
	}
	return nil
}

// Derive makes a secret for one purpose, such as one of the user's jobs. Secrets of different purposes are
// independent.
func Derive(secret []byte, purpose string) []byte {
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(purpose))
	return []byte(hex.EncodeToString(mac.Sum(nil)))
}

// ReadFile reads a secret from a private file (ReadPrivate), without white space around it, as variables lose theirs.
func ReadFile(path string) ([]byte, error) {
	secret, err := ReadPrivate(path, limits.MaxSecret+2)
	if err != nil {
		return nil, err
	}
	secret = bytes.TrimSpace(secret)
	if err := Check(secret); err != nil {
		return nil, fmt.Errorf("%s holds %w", path, err)
	}
	return secret, nil
}

// ReadPrivate reads at most room bytes of a file that has to be secret (OpenPrivate).
func ReadPrivate(path string, room int) ([]byte, error) {
	file, err := OpenPrivate(path, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, int64(room)))
}

// OpenPrivate opens a file that has to be secret, to read it. As ssh does with keys, it refuses a file that others may read or
// write, or that belongs to somebody other than this user and root; the error has the command that helps.
// The group may read a file of root's, which is how an orchestrator hands a secret to a user.
func OpenPrivate(path string, flags int) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|flags, 0)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil {
		err = private(info, os.Getuid())
	}
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("%s %w %s", path, err, path)
	}
	return file, nil
}

// private is why a file is not secret to a user, nil if it is. The error ends with a command for the file.
func private(info fs.FileInfo, user int) error {
	owner, mode := int(info.Sys().(*syscall.Stat_t).Uid), info.Mode()
	others := fs.FileMode(0o077)
	if owner != user {
		others = 0o027 // of a file of root's the group may read
	}
	switch {
	case !mode.IsRegular():
		return errors.New("is not a regular file; look at it by: ls -lL")
	case owner != user && owner != 0:
		return fmt.Errorf("belongs to user %d, who could change it, and not to user %d: run chown %d", owner, user, user)
	case mode.Perm()&others != 0:
		return fmt.Errorf("can be read or written by others (mode %#o): run chmod 600", mode.Perm())
	}
	return nil
}

// RunDir is the directory for files that the user's processes on this machine share: in the session's run directory
// (XDG_RUNTIME_DIR) if there is one, else in the directory for temporary files. Batch systems and su hand on variables of
// directories that are gone, or are another user's: these count as none.
func RunDir(sessionDir string) string {
	if info, err := os.Stat(sessionDir); err == nil && writable(sessionDir) && int(info.Sys().(*syscall.Stat_t).Uid) == os.Getuid() {
		return filepath.Join(sessionDir, "paceline")
	}
	temporary := os.TempDir()
	if !writable(temporary) {
		temporary = "/tmp"
	}
	return filepath.Join(temporary, fmt.Sprintf("paceline-%d", os.Getuid()))
}

func writable(dir string) bool { return unix.Access(dir, unix.W_OK|unix.X_OK) == nil }

// Shared reads the secret in directory dir, which the user's processes on this machine share, and makes it if there is
// none. Concurrent callers get the same secret: each writes its own to a temporary file and links that to the final
// name, which succeeds for one of them. The secret stays for later jobs and never changes.
func Shared(dir string) ([]byte, error) {
	if err := PrivateDir(dir); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "secret")
	secret, err := ReadFile(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return secret, err
	}
	fresh := filepath.Join(dir, "secret."+hex.EncodeToString(random(8)))
	defer os.Remove(fresh)
	if err := os.WriteFile(fresh, New(), 0o600); err != nil {
		return nil, err
	}
	if err := os.Link(fresh, path); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return ReadFile(path)
}

// PrivateDir makes dir, and refuses one that another user can write to.
func PrivateDir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	owner := info.Sys().(*syscall.Stat_t).Uid
	if !info.IsDir() || int(owner) != os.Getuid() || info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%s must be a directory of user %d that nobody else can enter (it is %v of user %d): remove it or set PACELINE_JOB_SECRET",
			dir, os.Getuid(), info.Mode(), owner)
	}
	return nil
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b) // never fails
	return b
}
