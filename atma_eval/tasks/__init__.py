"""Task families: each builds token samples and turns scores into records. No torch, no models here."""
