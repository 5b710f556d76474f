package condition

import (
	"fmt"
	"strconv"
	"strings"
)

// arguments are what a setting says behind a model's name. They are taken one by one; the first that
// is wrong is the error, and what is taken after it means nothing.
type arguments struct {
	setting, usage string // "ssp:3" and "ssp:S"
	text           string // behind the colon
	given          bool   // whether there is a colon
	err            error
}

// whole takes a whole number from least to most.
func (a *arguments) whole(name string, least, most uint64) uint64 {
	word := a.next(name)
	if a.err != nil {
		return 0
	}
	n, err := strconv.ParseUint(word, 10, 64)
	if err != nil || n < least || n > most {
		a.fail("%s is %q, allowed is a whole number from %d to %d", name, word, least, most)
	}
	return n
}

// iterations takes a number of iterations that a worker may lead by or do between barriers.
func (a *arguments) iterations(name string, least uint64) uint64 {
	return a.whole(name, least, MaxLead-1)
}

// probability takes a number from 0 to 1.
func (a *arguments) probability(name string) float64 {
	word := a.next(name)
	if a.err != nil {
		return 0
	}
	p, err := strconv.ParseFloat(word, 64)
	if err != nil || !(p >= 0 && p <= 1) {
		a.fail("%s is %q, allowed is a number from 0 to 1", name, word)
	}
	return p
}

// more reports whether another argument is there.
func (a *arguments) more() bool { return a.given && a.err == nil }

// next takes an argument as it stands.
func (a *arguments) next(name string) (word string) {
	if !a.more() {
		a.fail("%s is missing", name)
		return ""
	}
	word, a.text, a.given = strings.Cut(a.text, ",")
	return strings.TrimSpace(word)
}

// word takes the next argument if it is this word.
func (a *arguments) word(word string) bool {
	first, rest, more := strings.Cut(a.text, ",")
	if !a.more() || strings.TrimSpace(first) != word {
		return false
	}
	a.text, a.given = rest, more
	return true
}

func (a *arguments) fail(format string, values ...any) {
	if a.err == nil {
		a.err = fmt.Errorf("synchronisation model %q: %s (it is written %s)", a.setting, fmt.Sprintf(format, values...), a.usage)
	}
}

// end is m, or the error of an argument that was wrong or is one too many.
func (a *arguments) end(m Model) (Model, error) {
	if a.more() {
		a.fail("takes no argument %q", a.text)
	}
	if a.err != nil {
		return Model{}, a.err
	}
	return m, nil
}
