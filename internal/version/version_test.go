package version

import (
	"regexp"
	"testing"
)

func TestVersionSuitsGoAndPython(t *testing.T) {
	if v := String(); !regexp.MustCompile(`^\d+\.\d+\.\d+((a|b|rc)\d+)?$`).MatchString(v) {
		t.Fatalf("VERSION holds %q, want three numbers, with a1, b1 or rc1 behind them for a pre-release", v)
	}
}
