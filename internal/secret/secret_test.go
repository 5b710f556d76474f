package secret

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
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
		warning, err  string
	}{
		{"private", good + "\n", 0o600, "", ""},
		{"readable by others", good, 0o644, "can be read by others", ""},
		{"writable by others", good, 0o666, "", "can be written by others"},
		{"short", "abc", 0o600, "", "a secret of 3 bytes"},
		{"long", strings.Repeat("k", 5000), 0o600, "", "allowed are 16 to 4096"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			os.WriteFile(path, []byte(c.content), 0o600)
			os.Chmod(path, c.mode)
			secret, warning, err := ReadFile(path)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatal(err)
				}
				return
			}
			if err != nil || string(secret) != good || !strings.Contains(warning, c.warning) || (c.warning == "") != (warning == "") {
				t.Fatal(string(secret), warning, err)
			}
		})
	}
}

func TestDerivedSecretsDifferByPurpose(t *testing.T) {
	s := New()
	if bytes.Equal(Derive(s, "a"), Derive(s, "b")) || !bytes.Equal(Derive(s, "a"), Derive(s, "a")) {
		t.Fatal("derive")
	}
}
