package wire

import (
	"reflect"
	"testing"

	"github.com/paceline/paceline/internal/limits"
)

func TestACoverComesBackAsItWas(t *testing.T) {
	for _, c := range []Cover{{Ranks: []CoveredPushes{}}, {Closed: 1 << 60, Ranks: []CoveredPushes{{0, 1, 2}, {limits.MaxRanks - 1, 1 << 50, 3}}}} {
		var got Cover
		payload := c.Append(nil)
		if err := got.Decode(payload); err != nil || !reflect.DeepEqual(got, c) {
			t.Errorf("%+v came back as %+v, error %v", c, got, err)
		}
		for n := range payload {
			if err := got.Decode(payload[:n]); err == nil && (n-coverSize)%coveredSize != 0 {
				t.Errorf("%d bytes of %+v are taken", n, c)
			}
		}
	}
}

func TestCoversThatCannotBeAreRefused(t *testing.T) {
	for _, bad := range []Cover{
		{Ranks: []CoveredPushes{{1, 0, 0}, {1, 0, 0}}}, {Ranks: []CoveredPushes{{2, 0, 0}, {1, 0, 0}}}, {Ranks: []CoveredPushes{{limits.MaxRanks, 0, 0}}},
	} {
		if err := new(Cover).Decode(bad.Append(nil)); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
	if err := new(Cover).Decode(make([]byte, coverSize+(limits.MaxRanks+1)*coveredSize)); err == nil {
		t.Error("more ranks than a job may have are taken")
	}
}
