package secret

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

func TestAllWhoAskForTheSharedSecretAtOnceGetTheSame(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "paceline")
	got := make([][]byte, 16)
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() {
			var err error
			if got[i], err = Shared(dir); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, s := range got {
		if !bytes.Equal(s, got[0]) {
			t.Fatalf("different secrets: %s, %s", got[0], s)
		}
	}
	if err := Check(got[0]); err != nil {
		t.Fatal(err)
	}
	left, _ := os.ReadDir(dir)
	info, _ := os.Stat(filepath.Join(dir, "secret"))
	if len(left) != 1 || info.Mode().Perm() != 0o600 {
		t.Fatalf("left %v, mode %v", left, info.Mode())
	}
}

func TestSharedSecretRefusesADirectoryThatOthersCanEnter(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := Shared(dir); err == nil || !strings.Contains(err.Error(), "nobody else can enter") {
		t.Fatal(err)
	}
}

func TestReadFileChecksModeAndLength(t *testing.T) {
	good := strings.Repeat("k", 32)
	for _, c := range []struct {
		name, content string
		mode          os.FileMode
		err           string
	}{
		{"private", good + "\n", 0o600, ""},
		{"read-only", good, 0o400, ""},
		{"readable by others", good, 0o644, "can be read or written by others (mode 0644): run chmod 600 PATH"},
		{"readable by the group", good, 0o640, "run chmod 600 PATH"},
		{"writable by others", good, 0o602, "run chmod 600 PATH"},
		{"short", "abc", 0o600, "a secret of 3 bytes"},
		{"long", strings.Repeat("k", 5000), 0o600, "allowed are 16 to 4096"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			os.WriteFile(path, []byte(c.content), 0o600)
			os.Chmod(path, c.mode)
			secret, err := ReadFile(path)
			if want := strings.ReplaceAll(c.err, "PATH", path); c.err != "" {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Fatalf("error %v, want %s", err, want)
				}
				return
			}
			if err != nil || string(secret) != good {
				t.Fatal(string(secret), err)
			}
		})
	}
	if _, err := ReadFile(t.TempDir()); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Error(err)
	}
}

// owned is a file of some user's. The tests cannot give files away.
type owned struct {
	os.FileInfo
	mode os.FileMode
	user uint32
}

func (o owned) Mode() os.FileMode { return o.mode }
func (o owned) Sys() any          { return &syscall.Stat_t{Uid: o.user} }

func TestAPrivateFileBelongsToItsReaderOrRoot(t *testing.T) {
	for _, c := range []struct {
		mode  os.FileMode
		owner uint32
		err   string
	}{
		{0o600, 1000, ""},
		{0o400, 0, ""},
		{0o440, 0, ""}, // of root's, for a group that has this user
		{0o460, 0, "chmod 600"},
		{0o444, 0, "chmod 600"},
		{0o640, 1000, "chmod 600"},
		{0o600, 1001, "belongs to user 1001, who could change it, and not to user 1000: run chown 1000"},
	} {
		err := private(owned{mode: c.mode, user: c.owner}, 1000)
		if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Errorf("mode %#o of user %d: error %v, want %q", c.mode, c.owner, err, c.err)
		}
	}
}

func TestDerivedSecretsDifferByPurpose(t *testing.T) {
	s := New()
	if bytes.Equal(Derive(s, "a"), Derive(s, "b")) || !bytes.Equal(Derive(s, "a"), Derive(s, "a")) {
		t.Fatal("derive")
	}
}

func TestRunDirectoriesThatCannotBeUsedCountAsNone(t *testing.T) {
	session, temporary := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", temporary)
	user := fmt.Sprintf("paceline-%d", os.Getuid())
	others := t.TempDir()
	if os.Getuid() == 0 { // who may write everywhere
		if err := os.Chown(others, 65534, 65534); err != nil {
			t.Fatal(err)
		}
	} else if err := os.Chmod(others, 0o500); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ dir, want string }{
		{others, filepath.Join(temporary, user)},
		{session, filepath.Join(session, "paceline")},
		{"", filepath.Join(temporary, user)},
		{filepath.Join(session, "gone"), filepath.Join(temporary, user)},
	} {
		if got := RunDir(c.dir); got != c.want {
			t.Errorf("%q: %q instead of %q", c.dir, got, c.want)
		}
	}
	t.Setenv("TMPDIR", filepath.Join(temporary, "gone"))
	if got, want := RunDir(""), "/tmp/"+user; got != want {
		t.Errorf("%q instead of %q", got, want)
	}
}
