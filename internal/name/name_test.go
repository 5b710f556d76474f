package name

import (
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/limits"
)

func TestCheck(t *testing.T) {
	for text, want := range map[string]string{
		"layer.0/weight":                         "",
		"Gewichtung αβ \n":                       "",
		strings.Repeat("n", limits.MaxName):      "",
		"":                                       "a name of 0 bytes, allowed are 1 to 4096",
		strings.Repeat("n", limits.MaxName+1):    "a name of 4097 bytes",
		"layer\x00weight":                        "has a NUL at byte 5",
		"layer\xff":                              "which is not UTF-8",
		strings.Repeat("n", 4000) + "\x00" + "x": "has a NUL at byte 4000",
	} {
		err := Check(text)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 400) {
			t.Errorf("%.20q: error %v, want %q", text, err, want)
		}
	}
}
