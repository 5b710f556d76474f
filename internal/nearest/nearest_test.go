package nearest

import "testing"

func TestMisspeltWords(t *testing.T) {
	words := []string{"hosts", "hostfile", "np", "verbose", "timeline-filename"}
	for word, want := range map[string]string{"host": "hosts", "verbos": "verbose", "vrebose": "verbose", "timeline": "timeline-filename", "pn": "np", "what": "", "": ""} {
		if got := Meant(word, words); got != want {
			t.Errorf("%q means %q, not %q", word, want, got)
		}
	}
	if got := Of("what", words); got != "np" && got != "hosts" {
		t.Errorf("nearest to what is %q", got)
	}
	if Of("x", nil) != "" || Meant("x", nil) != "" {
		t.Error("a word of none")
	}
}

func TestAnErrorNamesWhatIsKnownAndWhatWasMeant(t *testing.T) {
	for word, want := range map[string]string{"sps": `did you mean "ssp"? Known are: bsp, ssp`, "elastic": "known are: bsp, ssp"} {
		if got := Known(word, []string{"bsp", "ssp"}); got != want {
			t.Errorf("%q: %s", word, got)
		}
	}
}

func TestDistanceCountsLetters(t *testing.T) {
	for _, one := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"kitten", "sitting", 3}, {"flaw", "lawn", 2}, {"same", "same", 0}, {"rnu", "run", 1}} {
		if got := distance(one.a, one.b); got != one.want || distance(one.b, one.a) != one.want {
			t.Errorf("%q and %q: %d", one.a, one.b, got)
		}
	}
}
