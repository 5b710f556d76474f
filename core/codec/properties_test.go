package codec

import "testing"

func TestTraitsAreThoseOfTheSetting(t *testing.T) {
	for _, want := range []Traits{
		{"none", true, true, 0, 0},
		{"int8:block=512", true, false, 0, 0},
		{"topk:0.01", false, false, 4, 0},
		{"dgc:0.001,momentum=0.5", false, false, 8, 0.5},
		{"dgc:0.001,momentum=0.5+s2", false, false, 8, 0.5},
		{"dgc:0.001,momentum=0", false, false, 8, 0},
	} {
		if got := TraitsOf(mustParse(t, want.Setting)); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
}
