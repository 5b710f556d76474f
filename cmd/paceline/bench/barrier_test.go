package bench

import (
	"strings"
	"testing"
)

func TestBarrierReportHoldsTheTimesAndThePapersTable(t *testing.T) {
	r, err := MeasureBarrier(BarrierPlan{Workers: 10, Predictions: 15, Searches: 5, Inputs: 1, Seed: 7})
	if err != nil {
		t.Fatal(err)
	}
	if r.Least <= 0 || r.Least > r.Median || r.Median > r.Most || r.OptBS <= 0 || r.Published != 0.09 || r.Wait < 100 || r.Wait > 1500 || len(r.Waits) != 10 {
		t.Errorf("%+v", r)
	}
	var text strings.Builder
	r.Show(&text)
	for _, want := range []string{"10 workers, 15 predictions of each: ", "published for the fastest exact search: 0.090 ms", " 1382 "} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%q is missing in\n%s", want, text.String())
		}
	}
}
