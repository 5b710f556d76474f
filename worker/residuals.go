package worker

import "slices"

// answerBytes is the size of the residual that the server of a partition keeps. Differences of held values have none.
func (k *coding) answerBytes(part int) int {
	if k.held {
		return 0
	}
	return k.answers.ResidualBytes(k.parts[part].elements)
}

// used reports whether any partition has a residual.
func (k *coding) used() bool {
	return slices.ContainsFunc(k.parts, func(p codedPart) bool { return len(p.residual) > 0 })
}

// stateBytes is the size of the residuals of all partitions.
func (k *coding) stateBytes() int {
	n := 0
	for i := range k.parts {
		n += k.codec.ResidualBytes(k.parts[i].elements)
	}
	return n
}

// save writes the residuals to b: of a codec that keeps several tensors, one behind the other.
func (k *coding) save(b []byte) {
	clear(b)
	k.each(b, func(whole, part []byte) { copy(whole, part) })
}

// load is the way back; nothing for zeros.
func (k *coding) load(b []byte) {
	for i := range k.parts {
		k.parts[i].residual = nil
		if len(b) > 0 {
			k.parts[i].residual = make([]byte, k.codec.ResidualBytes(k.parts[i].elements))
		}
	}
	if len(b) > 0 {
		k.each(b, func(whole, part []byte) { copy(part, whole) })
	}
}

// each calls f with the pieces of b and of partitions' residuals that belong together.
func (k *coding) each(b []byte, f func(whole, part []byte)) {
	tensors := k.codec.ResidualBytes(1) / 4
	for t := range tensors {
		for i := range k.parts {
			p := &k.parts[i]
			if size := 4 * p.elements; len(p.residual) > 0 {
				f(b[:size], p.residual[t*size:(t+1)*size])
			}
			b = b[4*p.elements:]
		}
	}
}
