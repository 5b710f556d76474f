package wire

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/limits"
)

func TestACoverComesBackAsItWas(t *testing.T) {
	for _, c := range []Cover{
		{Ranks: []CoveredPushes{}}, {Closed: 1 << 60, Ranks: []CoveredPushes{{0, 1, 2}, {limits.MaxRanks - 1, 1 << 50, 1<<60 + limits.MaxLead}}},
		{Ranks: []CoveredPushes{{4, 1, 1}}, Changes: []ChangedCondition{{7, true, "ssp:3"}, {1 << 40, false, "drop-stragglers:2"}}},
	} {
		var got Cover
		payload := c.Append(nil)
		if err := got.Decode(payload); err != nil || !reflect.DeepEqual(got, c) {
			t.Errorf("%+v came back as %+v, error %v", c, got, err)
		}
		for n := range payload {
			if err := got.Decode(payload[:n]); err == nil && !slices.Equal(got.Append(nil), payload[:n]) { // some of the changes
				t.Errorf("%d bytes of %+v are taken", n, c)
			}
		}
	}
}

func TestCoversThatCannotBeAreRefused(t *testing.T) {
	for _, bad := range []Cover{
		{Ranks: []CoveredPushes{{1, 0, 0}, {1, 0, 0}}}, {Ranks: []CoveredPushes{{2, 0, 0}, {1, 0, 0}}}, {Ranks: []CoveredPushes{{limits.MaxRanks, 0, 0}}},
		{Closed: 5, Ranks: []CoveredPushes{{1, 0, 6 + limits.MaxLead}}},
		{Changes: make([]ChangedCondition, limits.MaxChanges+1)}, {Changes: []ChangedCondition{{Model: strings.Repeat("x", limits.MaxSync+1)}}},
	} {
		if err := new(Cover).Decode(bad.Append(nil)); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
	if err := new(Cover).Decode(append(make([]byte, 8), 255, 255)); err == nil {
		t.Error("more ranks than there are bytes for are taken")
	}
}
