package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/paceline/paceline/node/settings"
)

func TestAKeyThatOthersCanReadIsRefused(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for _, path := range []string{cert, key} {
		if err := os.WriteFile(path, []byte("PEM"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s := &settings.Settings{TLSCert: cert, TLSKey: key, TLSCA: cert}
	if _, err := loadTLS(s); err == nil || strings.Contains(err.Error(), "chmod") {
		t.Errorf("error %v, want one about the content", err)
	}
	if err := os.Chmod(key, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := loadTLS(s); err == nil || !strings.Contains(err.Error(), "PACELINE_TLS_KEY: "+key+" can be read or written by others (mode 0640): run chmod 600 "+key) {
		t.Errorf("error %v, want the command that helps", err)
	}
}
