package address_test

import (
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/limits"
)

func TestAListHasAtMostOneAddressOfEachKind(t *testing.T) {
	l := address.List{{Kind: "shm", At: "1234"}, {Kind: "tcp", At: "10.0.0.1:4711"}}
	if err := l.Check(); err != nil {
		t.Error(err)
	}
	if at, ok := l.Of("tcp"); at != "10.0.0.1:4711" || !ok {
		t.Errorf("the address of kind tcp is %q, %v", at, ok)
	}
	if at, ok := l.Of("fabric"); ok {
		t.Errorf("the address of a kind that is not there is %q", at)
	}
	if got, want := l.String(), "shm 1234, tcp 10.0.0.1:4711"; got != want {
		t.Errorf("written as %q, want %q", got, want)
	}
}

func TestListsShareAnAddressOfOneKindAlone(t *testing.T) {
	l := address.List{{Kind: "shm", At: "1234"}, {Kind: "tcp", At: "10.0.0.1:4711"}}
	for _, c := range []struct {
		other address.List
		want  bool
	}{
		{address.List{{Kind: "tcp", At: "10.0.0.1:4711"}}, true},
		{address.List{{Kind: "tcp", At: "1234"}, {Kind: "shm", At: "10.0.0.1:4711"}}, false},
		{nil, false},
	} {
		if got := l.Shares(c.other); got != c.want || c.other.Shares(l) != c.want {
			t.Errorf("%v and %v: %v, want %v", l, c.other, got, c.want)
		}
	}
}

func TestAddressesOutOfBoundsAreRefused(t *testing.T) {
	for want, l := range map[string]address.List{
		"limit 8":               make(address.List, limits.MaxAddresses+1),
		"may be empty":          {{Kind: "tcp"}},
		"neither may":           {{At: "10.0.0.1:4711"}},
		"limit 1024":            {{Kind: "tcp", At: strings.Repeat("x", limits.MaxAddress)}},
		`two addresses of kind`: {{Kind: "tcp", At: "a:1"}, {Kind: "tcp", At: "b:1"}},
	} {
		if err := l.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: error %v, want one with %q", l, err, want)
		}
	}
}
