package pattern_test

import (
	"testing"

	"github.com/paceline/paceline/internal/pattern"
)

func TestASlashIsACharacterLikeAnyOther(t *testing.T) {
	for _, c := range []struct {
		pattern, name string
		fits          bool
	}{
		{"*", "encoder/0/weight", true}, {"layer1.*", "layer1.0.bias", true}, {"layer1.*", "layer2.0.bias", false},
		{"*/weight", "encoder/0/weight", true}, {"layer?", "layer/", true}, {"[odd", "[odd", true}, {"w[01]", "w1", true},
	} {
		if got := pattern.Match(c.pattern, c.name); got != c.fits {
			t.Errorf("%q and %q: %v", c.pattern, c.name, got)
		}
	}
	if pattern.Check("layer[1-3].*") != nil || pattern.Check("[odd") == nil {
		t.Error("Check takes what is wrong, or not what is right")
	}
}
