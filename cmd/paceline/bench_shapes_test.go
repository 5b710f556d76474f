package main

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestShapesAreListedWithTheirTensors(t *testing.T) {
	r := run(t, command(t, "bench", "shapes"))
	if r.code != 0 || !strings.Contains(r.stdout, "vgg16       32   138357544          553.4\n") {
		t.Error(r.code, r.stdout, r.stderr)
	}
	r = run(t, command(t, "bench", "shapes", "--json"))
	var listed []struct {
		Model    string
		Elements []int
	}
	if err := json.Unmarshal([]byte(r.stdout), &listed); err != nil || len(listed) != 8 || listed[1].Model != "resnet50" || listed[1].Elements[0] != 7*7*3*64 {
		t.Error(err, listed)
	}
}
