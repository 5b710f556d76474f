package papers

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// All experiments, small: the page keeps what stands around the marks, and is the same every time.
func TestPageIsWrittenBetweenItsMarks(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "results.md")
	if err := os.WriteFile(file, []byte("# Mine\n"+beginMark+"\nold\n"+endMark+"\nbelow\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	var texts [2]string
	for k := range texts {
		if err := (Lab{Iterations: 16, Scale: 60, Seed: 1}).Write(dir); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		texts[k] = string(text)
	}
	if texts[0] != texts[1] {
		t.Error("a second run writes another page")
	}
	text := texts[0]
	if !strings.HasPrefix(text, "# Mine\n"+beginMark) || !strings.HasSuffix(text, endMark+"\nbelow\n") || strings.Contains(text, "\nold\n") {
		t.Errorf("what stands around the marks is not kept, or what stands between them is:\n%s", text)
	}
	if strings.Contains(text, "%!") || strings.Contains(text, "NaN") || strings.Contains(text, "Inf ") {
		t.Errorf("badly formatted:\n%s", text)
	}
	charts, _ := filepath.Glob(filepath.Join(dir, "results", "*.svg"))
	for _, c := range charts {
		if !strings.Contains(text, "(results/"+filepath.Base(c)+")") {
			t.Errorf("%s is on no page", c)
		}
	}
	if len(charts) != 15 {
		t.Errorf("%d charts, want 15", len(charts))
	}
}

func TestPageWithoutMarksIsLeftAlone(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "results.md")
	if err := os.WriteFile(file, []byte("# Mine\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := Default().Write(dir); err == nil || !strings.Contains(err.Error(), beginMark) {
		t.Errorf("got %v", err)
	}
	if text, _ := os.ReadFile(file); string(text) != "# Mine\n" {
		t.Errorf("the page is now\n%s", text)
	}
}

// What docs/results.md says below figure 13 of PSLD.
func TestKeysStayWhereProcessorsVaryLittle(t *testing.T) {
	stay := map[string]bool{"AlexNet 0.5": true, "VGG-16 0.5": true, "ResNet-50 0.5": true, "ResNet-50 0.25": true}
	for _, m := range []trained{alexnetTrained, resnetTrained, vggTrained} {
		for _, share := range []float64{0.5, 0.25, 0.1, 0.05} {
			for _, setting := range []string{bySpeed, exploits, byPSLD} {
				j, err := Default().job(m, setting, 8, unit, disturbed(share))
				if err != nil {
					t.Fatal(err)
				}
				for range 7 {
					if _, err := j.Iterate(); err != nil {
						t.Fatal(err)
					}
				}
				if what := fmt.Sprint(m.name, " ", share); (j.Remaps == 0) != stay[what] {
					t.Errorf("%s, %s: %d remaps", what, setting, j.Remaps)
				}
			}
		}
	}
}

// The shapes that docs/results.md tells of, at a size that a test can run.
func TestShapesOfThePapers(t *testing.T) {
	l := Lab{Iterations: 100, Seed: 1}
	get := func(model string, k int) per100 {
		r, err := measure(l.alexnet(), model, parkings[k])
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	asp, half, ssp, lazy := get("asp", 0), get("pssp:3,0.5", 0), get("ssp:3", 0), get("ssp:3", 1)
	if !(asp.time < half.time && half.time < ssp.time) {
		t.Errorf("ASP %v, PSSP %v and SSP %v should rise", asp, half, ssp)
	}
	if !(lazy.time < ssp.time && lazy.delays < ssp.delays/4) {
		t.Errorf("lazy %v, soft barrier %v", lazy, ssp)
	}
	g, h := get("pssp:3,0.1", 0), get("ssp:12", 0)
	if !(g.time < 0.9*h.time && g.delays < h.delays/4) {
		t.Errorf("equal bounds: PSSP %v, SSP %v", g, h)
	}
}
