package node_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/paceline/paceline/core/policy"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node"
)

func TestAPolicyMayBeAFile(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	p, err := node.Compression(write("good.json", `[{"names": "layer1.*", "min_bytes": 0, "codec": "fp16"}]`+"\n"))
	if err != nil || fmt.Sprint(p.Choose(policy.Tensor{Name: "layer1.x", DType: units.Float32, Bytes: 4})) != "fp16" {
		t.Errorf("%v", err)
	}
	if _, err := node.Compression(write("bad.json", `[{}]`)); err == nil || !strings.Contains(err.Error(), "bad.json: policy, rule 1") {
		t.Errorf("%v", err)
	}
	if _, err := node.Compression(filepath.Join(dir, "none.json")); err == nil || !strings.Contains(err.Error(), "none.json") {
		t.Errorf("%v", err)
	}
	if _, err := node.Compression("nonsense"); err == nil || !strings.Contains(err.Error(), "unknown codec") {
		t.Errorf("%v", err)
	}
}
