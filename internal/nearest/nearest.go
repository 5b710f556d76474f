// Package nearest finds the word that somebody meant who has misspelt it.
package nearest

import "strings"

// Of is the candidate that differs from word in the fewest letters to insert, delete or change; the first of equals, ""
// where there are no candidates.
func Of(word string, candidates []string) string {
	best, fewest := "", -1
	for _, c := range candidates {
		if d := distance(word, c); fewest < 0 || d < fewest {
			best, fewest = c, d
		}
	}
	return best
}

// Meant is Of where the word is likely to mean the candidate: it is its beginning, or differs in a letter and another for
// every three; else "".
func Meant(word string, candidates []string) string {
	best := Of(word, candidates)
	if word != "" && distance(word, best) <= 1+len(word)/3 {
		return best
	}
	for _, c := range candidates {
		if word != "" && strings.HasPrefix(c, word) {
			return c
		}
	}
	return ""
}

// distance counts the letters to insert, delete or change to make b of a (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
