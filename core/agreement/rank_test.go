package agreement

import (
	"errors"
	"slices"
	"testing"
)

// TestAFailureThatEndsLaterOperationsDeclaresAnew: another declaration of the name has failed before, so that the
// failure itself is no news. The later operation that it ends is: what was declared since belongs to an older generation
// than what the other ranks declare after that operation.
func TestAFailureThatEndsLaterOperationsDeclaresAnew(t *testing.T) {
	u := NewUses[string, string](0)
	for _, use := range []struct{ o, d string }{{"first of x", "x"}, {"of y", "y"}, {"second of x", "x"}} {
		count, err := u.Count()
		if err != nil {
			t.Fatal(err)
		}
		u.Begin(count, use.o, use.d)
	}
	failure := errors.New("ranks disagree")
	if v := u.Failed(0, 1, failure); !v.Anew || !slices.Equal(v.Failed, []string{"of y"}) || len(v.Later) > 0 {
		t.Fatalf("the failure of y: %+v", v)
	}
	v := u.Failed(0, 0, failure)
	if !slices.Equal(v.Failed, []string{"first of x"}) || !slices.Equal(v.Later, []string{"second of x"}) {
		t.Errorf("the failure of x ends %v and %v", v.Failed, v.Later)
	}
	if u.Generation() != 6 || !v.Anew {
		t.Errorf("generation %d follows, declared anew: %v", u.Generation(), v.Anew)
	}
}

// A question beside the operations has a count that no operation and no other question has, so that its late answer is
// nobody's; a failure of the name ends it, and what follows is declared as if it had not been.
func TestWhatIsBesideTheOperationsHasACountOfItsOwn(t *testing.T) {
	u := NewUses[string, string](0)
	first := u.Beside("question", "d")
	u.End(first)
	second := u.Beside("question", "d")
	count, _ := u.Count()
	u.Begin(count, "operation", "d")
	if first == second || first == count || second == count || count != 0 {
		t.Errorf("counts %d and %d beside %d", first, second, count)
	}
	v := u.Failed(0, 0, errors.New("why"))
	if !slices.Equal(v.Failed, []string{"operation"}) || !slices.Equal(v.Later, []string{"question"}) || u.Generation() != 2 {
		t.Errorf("verdict %+v, generation %d", v, u.Generation())
	}
}
