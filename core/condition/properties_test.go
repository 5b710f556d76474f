package condition

import "testing"

// What each model tells of itself; those of drop-stragglers and expressions may close an iteration without a rank.
func TestTraitsOfEveryModel(t *testing.T) {
	none := ^uint64(0)
	for setting, want := range map[string]struct {
		traits Traits
		whole  bool
		quorum int // of 4; 0: not known
		bound  uint64
	}{
		"bsp":                         {Traits{}, true, 4, 0},
		"asp":                         {Traits{Ahead: true}, true, 4, none},
		"ssp:0":                       {Traits{Dataflow: Accumulate}, true, 4, 0},
		"ssp:3":                       {Traits{Ahead: true}, true, 4, 3},
		"dsps:0,7":                    {Traits{Ahead: true, Tuned: true}, true, 4, 7},
		"drop-stragglers:3":           {Traits{}, false, 3, 0},
		"drop-stragglers:9":           {Traits{}, false, 4, 0},
		"pssp:2,1":                    {Traits{Ahead: true}, true, 4, 2},
		"pssp:2,0.5":                  {Traits{Ahead: true}, true, 4, none},
		"dynamic-pssp:2,0.5":          {Traits{Ahead: true}, true, 4, none},
		"dynamic-pssp:2,significance": {Traits{Ahead: true, Significance: true}, true, 4, none},
		"adaptive:3,2":                {Traits{Ahead: true, Supersteps: true}, true, 4, 0},
		"elastic:9":                   {Traits{Ahead: true, Supersteps: true}, true, 4, 0},
		"expression:lead < 2":         {Traits{Ahead: true}, true, 4, none},
		"expression:significance > 1": {Traits{Ahead: true, Significance: true}, true, 4, none},
		"expression:;count[V] > 1":    {Traits{Dataflow: Accumulate}, false, 0, 0},
	} {
		want.traits.Setting, want.traits.Whole = setting, want.whole
		if want.traits.Ahead {
			want.traits.Dataflow = Accumulate
		}
		if got, err := Properties(setting); err != nil || got != want.traits {
			t.Errorf("%s: %+v, %v, want %+v", setting, got, err, want.traits)
		}
		m, err := Parse(setting)
		if err != nil {
			t.Fatal(err)
		}
		bound, bounded := m.Bound()
		if !bounded {
			bound = none
		}
		quorum, known := m.Quorum(4)
		if !known {
			quorum = 0
		}
		if m.Whole() != want.whole || quorum != want.quorum || bound != want.bound {
			t.Errorf("%s: whole %t, quorum %d, bound %d, want %+v", setting, m.Whole(), quorum, bound, want)
		}
	}
	if _, err := Properties("bps"); err == nil {
		t.Error("an unknown model has properties")
	}
}
